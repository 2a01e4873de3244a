"""Measurements of whole models at K3's own dimensions: their cost on paper, and on a device."""
