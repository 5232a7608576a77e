"""What is made at the training site: the source classifier, its SWAG posterior, its feature histograms."""
