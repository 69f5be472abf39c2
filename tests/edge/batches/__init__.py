"""Tests of OpenAI's files and batches at the edge."""
