"""The task the examples run on without any download: tiny frozen ViTs that know printed glyphs, and real handwritten digits."""
