"""What is run: grids of questions, trials, training, tracking and the report. Uses san, pipelines and cluster."""
