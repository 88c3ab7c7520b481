"""What a model would need and do on GPUs that are not here (`forerun plan`)."""
