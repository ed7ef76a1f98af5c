"""The explorer: a page that shows a kernel from its source to machine code."""
