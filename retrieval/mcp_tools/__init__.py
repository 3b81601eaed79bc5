"""Tools of Model Context Protocol servers as retrievers."""
