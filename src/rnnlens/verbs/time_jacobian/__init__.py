"""Computation of ``rl.jacobian``: request -> network -> plan -> execute -> label or store."""
