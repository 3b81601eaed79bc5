"""Tables, figures and the page that show evaluations and trainings."""
