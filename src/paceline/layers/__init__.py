"""Building blocks of a decoder; each says which checkpoint tensors fill its parameters."""
