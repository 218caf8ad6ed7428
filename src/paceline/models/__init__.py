"""Model families: reading a Hugging Face directory, building the decoder, filling it."""
