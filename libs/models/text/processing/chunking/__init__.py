"""Division of texts into chunks, and the pooling of late chunks."""
