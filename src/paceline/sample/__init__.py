"""From logits to token ids: processing, truncation, keyed Gumbel-max sampling, acceptance."""
