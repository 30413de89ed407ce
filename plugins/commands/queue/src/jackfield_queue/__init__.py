"""The commands `jackfield queue`: inspect, import, export and serve queues."""
