"""`smp.nn.huggingface`: state dictionaries keep the names of the model, so there is nothing to translate."""
