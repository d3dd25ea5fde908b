"""From conversations to batches: read and normalise, tokenise and mask, plan."""
