"""Objectives: each turns a step's rewards into advantages. registry.py lists them all."""
