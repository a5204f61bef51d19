"""A script of an elastic job, which ends once all are members again and NUM_BACK of them in a later life."""

SCRIPT = """
NUM_BACK = 1
import json, os, time
import ringweave, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(96, 8)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12, shuffle=True)
model, optimizer, loader = ringweave.prepare(model, optimizer, data)

def say(**words):
    print(json.dumps(words | {"member": os.environ["RINGWEAVE_MEMBER"]}), flush=True)

done = 0
with ringweave.Iterations() as iterations:
    for epoch in loader.epochs(100000):
        for given, wanted in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(given), wanted)
            loss.backward()
            optimizer.step()
            done += 1
            iterations.done(done, loss.item())
            say(step=done, members=list(loader.members))
            time.sleep(0.1)
        account = loader.account
        say(epoch=epoch, trained=account.total.num_samples, lost=account.lost.num_samples)
        num_back = sum(not each.endswith(".0") for each in loader.members)
        if num_back >= NUM_BACK and len(loader.members) == int(os.environ["WORLD_SIZE"]):
            break
say(sum=sum(float(each.detach().double().sum()) for each in model.parameters()))
"""
