"""Episodes to imitate: written from evidence, or chosen from played ones."""
