"""Training data: lines of JSON to records, to tokens with their labels, to packed batches."""
