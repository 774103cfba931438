"""A plan in words and pictures: terminal text, comparison, and one self-contained HTML page."""
