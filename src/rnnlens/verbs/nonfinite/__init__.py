"""Search for the first value that is not finite: data, weights, forward pass, loss, backward pass, in this order."""
