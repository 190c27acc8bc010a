# my first training loop. why does memory grow??
import torch
import torch.nn as nn

class CNN(nn.Module):
    def __init__(self):
        super(CNN, self).__init__()
        self.conv1 = nn.Conv2d(1, 64, 5, padding=2)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(64, 128, 5, padding=2)
        self.fc1 = nn.Linear(128 * 16 * 16, 1024)
        self.fc2 = nn.Linear(1024, 10)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = x.view(-1, 128 * 16 * 16)
        return self.fc2(self.drop(torch.relu(self.fc1(x))))

X = torch.rand(2048, 1, 64, 64)
Y = torch.randint(0, 10, (2048,))
net = CNN().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
total_loss = 0
losses, outs = [], []
net.train()
for epoch in range(2):
    for i in range(0, 1024, 256):
        x = X[i:i + 256].cuda()
        y = Y[i:i + 256].cuda()
        optimizer.zero_grad()
        out = net(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        total_loss += loss              # oops
        losses.append(loss)             # oops
        outs.append(out)                # oops
        print('epoch', epoch, 'batch', i, 'mem MB', torch.cuda.memory_allocated() / 1e6)
    # eval without no_grad, keeps everything alive
    val = net(X[1024:1536].cuda())
    outs.append(val)
print('total', total_loss.item(), len(losses))
acc = (torch.cat([o for o in outs]).argmax(1).cpu()[:256] == Y[:256]).float().mean()
print(acc)
print(torch.cuda.memory_summary())
