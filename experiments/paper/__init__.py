"""The published tables, the claims that the paper makes about them, and our counts at the paper's image size."""
