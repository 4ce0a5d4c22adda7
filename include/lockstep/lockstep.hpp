// lockstep: training torch::nn::Modules over several devices, on LibTorch. This header only includes; each idea has one
// of its own, in three storeys, each usable without the ones above:
//   1. train_batch, allreduce, split, on_each_device: the section "Training on Multiple GPUs", on plain lists
//   2. rank, evaluate, traffic: one thread per device, in one process or several; on ranks any torch::nn::Module, split
//        by data      data_parallel (sync_batch_norm, running_statistics, sharded_optimizer, balance, dropout; for
//                     fewer or smaller messages communication_hook, half_precision_hook, power_sgd, local_sgd)
//        by layers    pipeline (pipeline_schedule)
//        by channels  tensor_parallel (parallel_layers, parallel_dropout, parallel_functions)
//        by several   split_model (model_split), over a mesh (mesh_shape)
//      or with servers that keep the parameters: parameter_server
//      which of them: plan, from what layer_profile measures (model_profile, cluster)
//   3. trainer: what the program `lockstep` does
// The rest are leaves: data, models, residual_block, conv_relu_pool, optimizers (lars, lamb), learning_rate,
// checkpoint, metrics, autocast, …. Errors of all of them: error.hpp. Thread-safety and cost stand at the top of each
// header.
#pragma once

#include <torch/torch.h>
#include <lockstep/allreduce.hpp>
#include <lockstep/autocast.hpp>
#include <lockstep/balance.hpp>
#include <lockstep/check_replicas.hpp>
#include <lockstep/checkpoint.hpp>
#include <lockstep/clip_grad_norm.hpp>
#include <lockstep/cluster.hpp>
#include <lockstep/communication_hook.hpp>
#include <lockstep/conv_relu_pool.hpp>
#include <lockstep/criterion.hpp>
#include <lockstep/data.hpp>
#include <lockstep/data_parallel.hpp>
#include <lockstep/devices.hpp>
#include <lockstep/dropout.hpp>
#include <lockstep/error.hpp>
#include <lockstep/evaluate.hpp>
#include <lockstep/fetch_data.hpp>
#include <lockstep/finite.hpp>
#include <lockstep/half_precision_hook.hpp>
#include <lockstep/lamb.hpp>
#include <lockstep/lars.hpp>
#include <lockstep/layer_profile.hpp>
#include <lockstep/learning_rate.hpp>
#include <lockstep/local_sgd.hpp>
#include <lockstep/mesh.hpp>
#include <lockstep/metrics.hpp>
#include <lockstep/model_profile.hpp>
#include <lockstep/model_split.hpp>
#include <lockstep/models.hpp>
#include <lockstep/on_each_device.hpp>
#include <lockstep/optimizer_checkpoint.hpp>
#include <lockstep/optimizers.hpp>
#include <lockstep/parallel_dropout.hpp>
#include <lockstep/parallel_functions.hpp>
#include <lockstep/parallel_layers.hpp>
#include <lockstep/parameter_server.hpp>
#include <lockstep/pipeline.hpp>
#include <lockstep/pipeline_schedule.hpp>
#include <lockstep/plan.hpp>
#include <lockstep/power_sgd.hpp>
#include <lockstep/rank.hpp>
#include <lockstep/residual_block.hpp>
#include <lockstep/running_statistics.hpp>
#include <lockstep/sample_scope.hpp>
#include <lockstep/sharded_optimizer.hpp>
#include <lockstep/shares.hpp>
#include <lockstep/split.hpp>
#include <lockstep/split_model.hpp>
#include <lockstep/sync_batch_norm.hpp>
#include <lockstep/tensor_parallel.hpp>
#include <lockstep/traffic.hpp>
#include <lockstep/train_batch.hpp>
#include <lockstep/trainer.hpp>
