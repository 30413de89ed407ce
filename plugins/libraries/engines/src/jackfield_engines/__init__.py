"""What training engines of Jackfield share; it provides no plugin."""
