"""What a recurrent call did, step by step: the record that every sweep starts from."""
