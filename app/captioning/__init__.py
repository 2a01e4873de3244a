"""The batch captioner: inputs, journal, outputs, the two kinds of engine, and the run itself."""
