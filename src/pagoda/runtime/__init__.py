"""From a scheduled step to tensors: programs, batches, the model runner and sampling."""
