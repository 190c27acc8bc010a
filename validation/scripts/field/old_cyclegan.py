# CycleGAN, code from 2018 that still gets passed around the lab
import itertools, random, os
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable
import torch.backends.cudnn as cudnn

os.environ['CUDA_VISIBLE_DEVICES'] = '0'
cudnn.benchmark = False
cudnn.deterministic = True
random.seed(0); torch.manual_seed(0); torch.cuda.manual_seed_all(0)
cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor


class ResidualBlock(nn.Module):
    def __init__(self, in_features):
        super(ResidualBlock, self).__init__()
        self.conv_block = nn.Sequential(*[nn.ReflectionPad2d(1), nn.Conv2d(in_features, in_features, 3), nn.InstanceNorm2d(in_features), nn.ReLU(inplace=True),
                                          nn.ReflectionPad2d(1), nn.Conv2d(in_features, in_features, 3), nn.InstanceNorm2d(in_features)])

    def forward(self, x):
        return x + self.conv_block(x)


def generator(n=9, f=64):
    m = [nn.ReflectionPad2d(3), nn.Conv2d(3, f, 7), nn.InstanceNorm2d(f), nn.ReLU(inplace=True)]
    for _ in range(2):
        m += [nn.Conv2d(f, 2 * f, 3, stride=2, padding=1), nn.InstanceNorm2d(2 * f), nn.ReLU(inplace=True)]
        f *= 2
    m += [ResidualBlock(f) for _ in range(n)]
    for _ in range(2):
        m += [nn.ConvTranspose2d(f, f // 2, 3, stride=2, padding=1, output_padding=1), nn.InstanceNorm2d(f // 2), nn.ReLU(inplace=True)]
        f //= 2
    return nn.Sequential(*m, nn.ReflectionPad2d(3), nn.Conv2d(f, 3, 7), nn.Tanh())


class D(nn.Module):
    def __init__(self):
        super(D, self).__init__()
        m = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for i, o in ((64, 128), (128, 256), (256, 512)):
            m += [nn.Conv2d(i, o, 4, 2, 1), nn.InstanceNorm2d(o), nn.LeakyReLU(0.2, inplace=True)]
        self.model = nn.Sequential(*m, nn.Conv2d(512, 1, 4, padding=1))

    def forward(self, x):
        x = self.model(x)
        return F.avg_pool2d(x, x.size()[2:]).view(x.size()[0])


class ReplayBuffer():
    def __init__(self, max_size=6):
        self.max_size, self.data = max_size, []

    def push_and_pop(self, data):
        out = []
        for e in data.data:
            e = torch.unsqueeze(e, 0)
            if len(self.data) < self.max_size:
                self.data.append(e); out.append(e)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.max_size - 1)
                out.append(self.data[i].clone()); self.data[i] = e
            else:
                out.append(e)
        return Variable(torch.cat(out))


G1, G2, D1, D2 = generator(), generator(), D(), D()
if cuda:
    G1.cuda(); G2.cuda(); D1.cuda(); D2.cuda()
G1, G2 = nn.DataParallel(G1, device_ids=[0]), nn.DataParallel(G2, device_ids=[0])
mse, l1 = nn.MSELoss(), nn.L1Loss()
oG = torch.optim.Adam(itertools.chain(G1.parameters(), G2.parameters()), lr=0.0002, betas=(0.5, 0.999))
oD1, oD2 = torch.optim.Adam(D1.parameters(), lr=0.0002), torch.optim.Adam(D2.parameters(), lr=0.0002)
bs, size = 2, 256
inA, inB = Tensor(bs, 3, size, size), Tensor(bs, 3, size, size)
ones = Variable(Tensor(bs).fill_(1.0), requires_grad=False)
zeros = Variable(Tensor(bs).fill_(0.0), requires_grad=False)
bufA, bufB = ReplayBuffer(), ReplayBuffer()
for it in range(3):
    A = Variable(inA.copy_(torch.rand(bs, 3, size, size)))
    B = Variable(inB.copy_(torch.rand(bs, 3, size, size)))
    oG.zero_grad()
    idt = l1(G1(B), B) * 5.0 + l1(G2(A), A) * 5.0
    fB = G1(A); gan1 = mse(D2(fB), ones)
    fA = G2(B); gan2 = mse(D1(fA), ones)
    cyc = l1(G2(fB), A) * 10.0 + l1(G1(fA), B) * 10.0
    loss_G = idt + gan1 + gan2 + cyc
    loss_G.backward()
    oG.step()
    for net, o, real, fake, buf in ((D1, oD1, A, fA, bufA), (D2, oD2, B, fB, bufB)):
        o.zero_grad()
        loss_D = (mse(net(real), ones) + mse(net(buf.push_and_pop(fake).detach()), zeros)) * 0.5
        loss_D.backward()
        o.step()
    print(it, loss_G.data.item(), loss_D.data.item())
