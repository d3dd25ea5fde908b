"""Tiny models are faster on one thread than on two that wait for each other, three times so beside other work."""

import torch

torch.set_num_threads(1)
