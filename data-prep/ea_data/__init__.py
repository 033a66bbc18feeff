"""From raw parallel text to fairseq's binary data: one pipeline, which every corpus in data-prep/ goes through."""
