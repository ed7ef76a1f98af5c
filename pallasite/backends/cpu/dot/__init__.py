"""Matrix products: schemes, packing, microkernels."""
