"""SGLang's own endpoints: generate, control, observe."""
