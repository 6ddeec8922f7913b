"""Device side of the runtime: the header generated from the Python words and places, and the CUDA twins that include it."""
