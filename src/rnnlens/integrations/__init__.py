"""What the users of one framework need beside the verbs: one room each, loaded when it is first asked for."""
