"""How a peer is spoken to: the first line is the number of threads, every other line a task; a line is answered by a line."""
import sys

import torch


def serve(*tasks):
    """Does tasks by their name until the input ends. An answer is a number, or an error after `!`."""
    by_name = {task.__name__: task for task in tasks}
    torch.set_num_threads(int(sys.stdin.readline()))
    print(torch.get_num_threads(), flush=True)
    torch.manual_seed(0)
    for line in sys.stdin:
        name, *words = line.split()
        try:
            print(by_name[name](*words), flush=True)
        except Exception as error:
            print("!", " ".join(str(error).split())[:200], flush=True)
