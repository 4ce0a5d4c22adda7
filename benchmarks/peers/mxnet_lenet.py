"""The section's algorithm in MXNet, on one or several contexts of the CPU: the parameters are copied to every context,
a minibatch is split over them, gradients are added on the first and copied back, and each context updates its copy.

What differs from the section's text: the data are in memory, and the initial weights and the order of the samples come
from files that draws.py wrote, so that all peers train alike. Prints what lockstep writes into metrics.jsonl: one JSON
object per epoch, whose `seconds` times the training alone.
"""

import pathlib
import time

import numpy
import task
from mxnet import autograd, cpu, gluon, np, npx

npx.set_np()

weight_shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
loss = gluon.loss.SoftmaxCrossEntropyLoss()


def load(folder, prefix):
    def read(name):
        data, offset, shape = task.read_idx(folder, name)
        return numpy.frombuffer(data, dtype=numpy.uint8, offset=offset).reshape(shape)

    images, labels = read(f"{prefix}-images-idx3-ubyte"), read(f"{prefix}-labels-idx1-ubyte")
    return images[:, None].astype(numpy.float32) / 255, labels.astype(numpy.int32)


def initial_params(folder):
    values = numpy.fromfile(folder / "weights.f32", dtype=numpy.float32)
    parts = numpy.split(values, numpy.cumsum([numpy.prod(shape) for shape in weight_shapes])[:-1])
    return [np.array(part.reshape(shape)) for part, shape in zip(parts, weight_shapes)]


def lenet(X, params):
    h1_conv = npx.convolution(data=X, weight=params[0], bias=params[1], kernel=(3, 3), num_filter=20)
    h1_activation = npx.relu(h1_conv)
    h1 = npx.pooling(data=h1_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2_conv = npx.convolution(data=h1, weight=params[2], bias=params[3], kernel=(5, 5), num_filter=50)
    h2_activation = npx.relu(h2_conv)
    h2 = npx.pooling(data=h2_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = h2.reshape(h2.shape[0], -1)
    h3_linear = np.dot(h2, params[4]) + params[5]
    h3 = npx.relu(h3_linear)
    return np.dot(h3, params[6]) + params[7]


def get_params(params, device):
    new_params = [p.copyto(device) for p in params]
    for p in new_params:
        p.attach_grad()
    return new_params


def allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].ctx)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def sgd(params, lr, batch_size):
    for param in params:
        param[:] = param - lr * param.grad / batch_size


def train_batch(X, y, device_params, devices, lr):
    """The losses and the right answers of each context's part, as arrays that MXNet may still be computing."""
    X_shards = gluon.utils.split_and_load(X, devices, even_split=False)
    y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
    with autograd.record():
        logits = [lenet(X_shard, params) for X_shard, params in zip(X_shards, device_params)]
        ls = [loss(logit, y_shard) for logit, y_shard in zip(logits, y_shards)]
    for l in ls:
        l.backward()
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:
        sgd(params, lr, X.shape[0])
    right = [logit.argmax(axis=1).astype("int32") == y_shard for logit, y_shard in zip(logits, y_shards)]
    return ls, right


def accuracy(params, x, y):
    correct = 0
    for i in range(0, len(x), 1000):
        logits = lenet(np.array(x[i:i + 1000]), params).asnumpy()
        correct += int((logits.argmax(1) == y[i:i + 1000]).sum())
    return correct / len(x)


def main():
    parser = task.parser(__doc__)
    parser.add_argument("--contexts", type=int, default=1, help="cpu(0), cpu(1), …; OMP_NUM_THREADS: threads of each")
    parser.add_argument("--draws", type=pathlib.Path, required=True, help="folder that draws.py wrote for this seed")
    options = parser.parse_args()

    devices = [cpu(i) for i in range(options.contexts)]
    train_x, train_y = load(options.data_dir, "train")
    test_x, test_y = load(options.data_dir, "t10k")
    params = initial_params(options.draws)
    device_params = [get_params(params, device) for device in devices]

    for epoch in range(1, options.epochs + 1):
        npx.waitall()
        start = time.perf_counter()
        order = numpy.fromfile(options.draws / f"order-{epoch}.i64", dtype=numpy.int64)
        loss_sum, correct = 0.0, 0
        for i in range(0, len(order), options.batch_size):
            index = order[i:i + options.batch_size]
            X, y = np.array(train_x[index]), np.array(train_y[index], dtype="int32")
            ls, right = train_batch(X, y, device_params, devices, options.lr)
            npx.waitall()
            loss_sum += sum(float(l.asnumpy().sum(dtype=numpy.float64)) for l in ls)
            correct += sum(int(part.asnumpy().sum()) for part in right)
        seconds = time.perf_counter() - start
        task.print_metrics(epoch, loss_sum / len(order), correct / len(order),
                           accuracy(device_params[0], test_x, test_y), seconds)


if __name__ == "__main__":
    main()
