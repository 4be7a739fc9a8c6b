"""Show what a stream contains, and what alma-prep did."""
