# MNIST on two ranks, with the installed package alone.
#   docker build --tag hostopt .
#   docker run --rm --init --shm-size 1g --volume mnist_model:/home/hostopt/model hostopt
FROM python:3.11-slim AS build
WORKDIR /source
COPY . .
RUN python -m pip wheel --quiet --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN python -m pip install --quiet --no-cache-dir --constraint /wheels/constraints.txt /wheels/*.whl
RUN useradd --create-home hostopt
USER hostopt
WORKDIR /home/hostopt
# a volume that is mounted here belongs to this user, too
RUN mkdir model
COPY examples/mnist mnist
ENTRYPOINT ["hostopt", "run", "-np", "2", "--", "python", "mnist/main.py", "--model-dir", "model"]
