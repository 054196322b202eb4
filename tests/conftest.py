"""One torch thread everywhere: results are compared to the last bit, and two cores are shared by many peers."""

import torch

torch.set_num_threads(1)
