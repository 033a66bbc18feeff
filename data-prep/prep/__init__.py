"""From raw parallel text to fairseq's binary data: one pipeline, which every recipe in data-prep/ runs."""
