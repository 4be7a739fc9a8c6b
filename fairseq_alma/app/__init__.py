"""Code that the commands alma-lm and alma-vision share. It imports no other package of the project except core."""
