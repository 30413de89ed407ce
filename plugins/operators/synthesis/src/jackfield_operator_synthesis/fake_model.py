"""A model for tests, whose answer is always ``So 5.``."""

from __future__ import annotations

from jackfield_model_requests.fake_model import serve

if __name__ == "__main__":
    serve(lambda text: "So 5.")
