"""Questions with known answers: read, asked, scored, told beside what needs no model."""
