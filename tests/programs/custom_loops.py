"""Trains in loops with strategy.run: without a strategy, or as a rank of a strategy.

The argument "single" trains on the whole batch without strategy.
"""

import json

import tensorflow as tf
from one_or_two import DATA, RANK, SCOPE, SINGLE, STRATEGY, X, Y, refusal

import estimator_ext

keras = tf.keras


def run(fn, *args):
    return fn(*args) if STRATEGY is None else STRATEGY.run(fn, args)


class Training:
    """A model, and a step that sums the losses of its examples."""

    def __init__(self, optimizer):
        with SCOPE():
            kernel = tf.random.stateless_normal([5, 7], [3, RANK])  # that of rank 0 counts
            self.variables = [tf.Variable(kernel), tf.Variable(tf.ones([7, 1]) / 7)]
            self.optimizer = optimizer()

    def __call__(self, x, y):
        with tf.GradientTape() as tape:
            predicted = tf.tanh(x @ self.variables[0]) @ self.variables[1]
            loss = tf.reduce_sum((predicted - y) ** 2) / 16
        gradients = tape.gradient(loss, self.variables)
        self.optimizer.apply_gradients(zip(gradients, self.variables))
        return loss

    @property
    def values(self):
        return [each.numpy().tolist() for each in self.variables]


def iterated():
    """Reads batches in a function with next(), and sums the losses of the ranks."""
    training = Training(lambda: keras.optimizers.Adam(0.01))
    data = DATA if STRATEGY is None else STRATEGY.experimental_distribute_dataset(DATA)

    @tf.function
    def step(iterator):
        loss = run(training, *next(iterator))
        return loss if STRATEGY is None else STRATEGY.reduce("SUM", loss, axis=None)

    losses = []
    for _ in range(5):
        iterator = iter(data)
        losses += [float(step(iterator)) for _ in range(4)]
    return [losses, training.values]


def loop_in_function():
    """Reads batches of `distribute_datasets_from_function` in a loop of a function."""
    training = Training(lambda: keras.optimizers.legacy.SGD(0.01, momentum=0.9))
    data = DATA
    if STRATEGY is not None:
        data = STRATEGY.distribute_datasets_from_function(
            lambda context: (
                DATA.unbatch()
                .batch(context.get_per_replica_batch_size(16))
                .shard(context.num_input_pipelines, context.input_pipeline_id)
            )
        )

    @tf.function
    def epoch():
        for x, y in data:
            run(training, x, y)

    for _ in range(5):
        epoch()
    return training.values


def in_function():
    """Distributes data in a function, whose shapes TensorFlow does not know."""
    training = Training(lambda: keras.optimizers.SGD(0.01))

    def without_shape(x, y):
        return tf.compat.v1.placeholder_with_default(x, [None, None]), y

    @tf.function
    def epoch():
        for data in DATA.map(without_shape), outside:
            if STRATEGY is not None:
                data = STRATEGY.experimental_distribute_dataset(data)  # noqa: PLW2901
            for x, y in data:
                run(training, x, y)

    outside = DATA.map(without_shape)
    epoch()
    return training.values


def rows_of_rank(step, sizes):
    """Returns rows of the data: all without strategy, else those of a rank of two."""
    begin = sum(sum(each) for each in sizes[:step])
    first = begin + sizes[step][0]
    end = first + sizes[step][1]
    chosen = (
        slice(begin, end) if STRATEGY is None else [slice(begin, first), slice(first, end)][RANK]
    )
    return X[chosen], Y[chosen]


def traced_at_different_times(make):
    """Each rank traces its function anew in other steps than the other."""
    training = Training(make)
    step = tf.function(lambda x, y: run(training, x, y), reduce_retracing=False)
    sizes = [(4, 4), (4, 2), (4, 2), (3, 4), (1, 5)]
    for i in range(len(sizes)):
        step(*rows_of_rank(i, sizes))
    return training.values


def eager():
    training = Training(lambda: tf.compat.v1.train.AdamOptimizer(0.01))
    sizes = [(4, 4), (2, 6), (4, 4)]
    for i in range(len(sizes)):
        run(training, *rows_of_rank(i, sizes))
    return training.values


def rows_of_a_table():
    """Trains a table with sparse gradients, and a matrix in buckets."""
    with SCOPE():
        table = tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))
        matrix = tf.Variable(tf.fill([2, 40000], 0.1))
        optimizers = keras.optimizers.Adagrad(0.1), keras.optimizers.legacy.SGD(1e-6)
    ids = tf.constant([[1, 2, 2, 3], [3, 4, 1, 9]])
    ids = tf.reshape(ids, [-1]) if STRATEGY is None else ids[RANK]

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids) @ matrix)
        for_table, for_matrix = tape.gradient(loss, [table, matrix])
        optimizers[0].apply_gradients([(for_table, table)])
        optimizers[1].apply_gradients([(for_matrix, matrix)])

    for _ in range(3):
        tf.function(lambda: run(step))()
    return [table.numpy().tolist(), matrix.numpy()[:, :3].tolist()]


def all_reduced():
    """Reduces gradients itself, and updates without an optimizer."""
    training = Training(lambda: None)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ training.variables[0] @ training.variables[1] - y) ** 2)
        gradients = tape.gradient(loss, training.variables)
        if STRATEGY is not None:
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("SUM", gradients)
        for gradient, variable in zip(gradients, training.variables):
            variable.assign_sub(1e-4 * gradient)

    tf.function(lambda: run(step, *rows_of_rank(0, [(4, 4)])))()
    return training.values


def step_of_values():
    context = tf.distribute.get_replica_context()
    rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        squares = tf.reduce_sum(context.all_reduce("SUM", x * (rank + 1)) ** 2)
    return {
        "sums": context.all_reduce("SUM", [rank + 1, tf.stack([rank, rank])]),
        "mean": context.all_reduce(tf.distribute.ReduceOp.MEAN, rank),
        "rows": context.all_gather(tf.fill([1 + RANK, 2], rank), axis=0),
        "columns": context.all_gather(tf.fill([2, 1 + RANK], rank), axis=1),
        "merged": context.merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(rank,)),
        "gradient": tape.gradient(squares, x),
        "rank": rank,
    }


def values():
    results = {}
    for name, wrap in (("function", tf.function), ("eager", lambda fn: fn)):
        result = wrap(lambda: STRATEGY.run(step_of_values))()
        found = tf.nest.map_structure(lambda each: each.numpy().tolist(), result)
        found["total"] = float(STRATEGY.reduce("SUM", result["rank"], axis=None))
        found["mean of rows"] = STRATEGY.reduce("MEAN", result["rows"], axis=0).numpy().tolist()
        found["gathered"] = STRATEGY.gather(tf.fill([RANK + 1], RANK), axis=0).numpy().tolist()
        results[name] = found
    return results


def variables():
    """Changes variables of each kind with values of this rank."""
    on_read = tf.VariableSynchronization.ON_READ
    by = tf.VariableAggregation
    with SCOPE():
        kinds = [
            tf.Variable(1.0, aggregation=by.SUM),
            tf.Variable(1.0, aggregation=by.MEAN),
            tf.Variable(1.0, aggregation=by.ONLY_FIRST_REPLICA),
            tf.Variable(0.0, synchronization=on_read, aggregation=by.SUM),
            tf.Variable(0.0, synchronization=on_read, aggregation=by.MEAN),
        ]
        initial = tf.Variable(float(RANK + 5))
    created = []

    @tf.function
    def step():
        def update():
            if not created:
                created.append(tf.Variable(float(RANK + 7)))
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            for each in kinds:
                each.assign_add(tf.cast(rank, tf.float32) + 1)

        STRATEGY.run(update)

    step()
    return [float(each.numpy()) for each in [*kinds, initial, *created]]


def refusals():
    """Returns the errors of loops that train each rank alone."""
    training = Training(lambda: keras.optimizers.SGD(0.1))
    batch = X[:4], Y[:4]
    with STRATEGY.scope():
        variable = tf.Variable(1.0)
    outside = tf.Variable(1.0)

    def in_scope():
        with STRATEGY.scope():
            training(*batch)

    def assign(x):
        return STRATEGY.run(lambda x: variable.assign_sub(tf.reduce_sum(x)), (x,))

    def assign_random():
        return STRATEGY.run(lambda: variable.assign_sub(tf.random.normal([])))

    def manual():
        with tf.GradientTape() as tape:
            loss = variable * 2
        variable.assign_sub(tape.gradient(loss, variable))

    def applied_outside():
        training.optimizer.apply_gradients([(tf.constant(1.0), variable)])

    cases = {
        "no run": lambda: training(*batch),
        "no run in a function": tf.function(lambda: training(*batch)),
        "scope": in_scope,
        "assign eagerly": lambda: assign(batch[0]),
        "assign in a function": lambda: tf.function(assign)(batch[0]),
        "assign random numbers": tf.function(assign_random),
        "manual": manual,
        "applied outside": applied_outside,
        "created outside": lambda: STRATEGY.run(
            lambda: training.optimizer.apply_gradients([(tf.constant(1.0), outside)])
        ),
        "xla": tf.function(lambda: STRATEGY.run(training, batch), jit_compile=True),
    }
    return {name: refusal(case) for name, case in cases.items()}


def batches_of_a_function(counts):
    """Counts the steps of a loop over datasets with these numbers of batches."""
    count = counts[RANK]
    rows = tf.data.Dataset.range(8).batch(8)
    data = STRATEGY.distribute_datasets_from_function(
        lambda context: rows.repeat() if count is None else rows.repeat(count)
    )

    @tf.function
    def rows_of_steps():
        steps = total = tf.constant(0)
        for batch in data:
            total += STRATEGY.run(tf.size, (batch,))
            steps += 1
        return steps, total

    return [int(each) for each in rows_of_steps()]


def assignments():
    """Assigns the same values on all ranks; different ones raise an error."""
    with STRATEGY.scope():
        variable = tf.Variable([1.0, 2.0])
    variable.assign([3.0, 4.0])
    variable.scatter_add(tf.IndexedSlices(tf.constant([1.0]), tf.constant([1])))
    tf.function(variable.assign_add)(tf.constant([0.5, 0.5]))
    return [variable.numpy().tolist(), refusal(lambda: variable.assign([0.0, RANK]))]


def skipped_updates():
    with estimator_ext.HostOffloadStrategy(nonfinite="skip").scope():
        variable, optimizer = tf.Variable(1.0), keras.optimizers.SGD(0.1)
    strategy = variable.distribute_strategy
    strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]))


results = {
    "iterated": iterated(),
    "loop in a function": loop_in_function(),
    "in a function": in_function(),
    "traced": traced_at_different_times(lambda: keras.optimizers.Adam(0.01)),
    "traced v1": traced_at_different_times(
        lambda: tf.compat.v1.train.MomentumOptimizer(0.01, 0.9)
    ),
    "eager": eager(),
    "table": rows_of_a_table(),
    "all reduced": all_reduced(),
}
if not SINGLE:
    results["values"] = values()
    results["variables"] = variables()
    results["refusals"] = refusals()
    results["batches"] = batches_of_a_function([2, 3])
    results["assignments"] = assignments()
    results["refusals"]["endless"] = refusal(lambda: batches_of_a_function([2, None]))
    STRATEGY.close()
    results["refusals"]["skip"] = refusal(skipped_updates)
print("RESULT", json.dumps(results), flush=True)
