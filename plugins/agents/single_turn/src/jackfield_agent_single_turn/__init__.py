"""The plainest agent of Jackfield: one question, one answer."""
