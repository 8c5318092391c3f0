"""What attention does, measured: diffusion, metrics, clusters, and the two-moons experiment.

Plain torch (and scikit-learn for the data); nothing here is registered.
"""
