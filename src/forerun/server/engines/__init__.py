"""Engine processes: starting, reaching, watching and replacing them."""
