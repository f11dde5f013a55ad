"""Where the first number that is not finite comes from: data, weights, forward pass, loss, backward pass, in order."""
