"""The operators of Data-Juicer, by name and with their own settings, as operators of Jackfield's pipelines."""
