"""A number of a model differentiated by its tensors: the request, how it is answered, and why there is no gradient."""
