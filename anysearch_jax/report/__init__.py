"""Tables, figures and the HTML page that report evaluations and trainings."""
