"""The command ``jackfield parity``: engines and servers beside a float64 reference."""
