GGUF = "model.gguf"  # the weights, in the model folder that `folder.py` makes of a GGUF file
