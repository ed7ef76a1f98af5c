module @attention {
  func.func @main(%i0: i32, %i1: i32, %i2: i32, %ref: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_1: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_2: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_3: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_4: memref<128x128xf32, #tpu.memory_space<vmem>>, %ref_5: memref<128x128xf32, #tpu.memory_space<vmem>>, %ref_6: memref<128x128xf32, #tpu.memory_space<vmem>>)
      attributes {dimension_semantics = [#tpu.dimension_semantics<arbitrary>, #tpu.dimension_semantics<arbitrary>, #tpu.dimension_semantics<arbitrary>], iteration_bounds = array<i64: 4, 4, 4>, scalar_prefetch = 0 : i64, scratch_operands = 3 : i64, tpu.core_type = #tpu.core_type<tc>, window_params = [
        {transform_indices = @map_0, window_bounds = array<i64: 1, 128, 128>},
        {transform_indices = @map_1, window_bounds = array<i64: 1, 128, 128>},
        {transform_indices = @map_2, window_bounds = array<i64: 1, 128, 128>},
        {transform_indices = @map_3, window_bounds = array<i64: 1, 128, 128>}]} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant dense<0xFF800000> : vector<128x128xf32>
    %c2 = arith.constant 0 : index
    %c3 = arith.constant dense<0.0> : vector<128x128xf32>
    %c4 = arith.constant 128 : i32
    %c5 = arith.constant 127 : i32
    %c6 = arith.constant dense<0.0883883461356163> : vector<128x128xf32>
    %c7 = arith.constant dense<0xFF800000> : vector<128xf32>
    %c8 = arith.constant dense<0.0> : vector<128xf32>
    %c9 = arith.constant dense<-1.0000000150474662e+30> : vector<128x128xf32>
    %c10 = arith.constant 3 : i32
    %0 = arith.cmpi eq, %i2, %c0 : i32
    %1 = arith.extui %0 : i1 to i32
    %2 = arith.cmpi sgt, %1, %c0 : i32
    scf.if %2 {
      vector.store %c1, %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      vector.store %c3, %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      vector.store %c3, %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
    }
    %3 = arith.cmpi sle, %i2, %i1 : i32
    %4 = arith.extui %3 : i1 to i32
    %5 = arith.cmpi sgt, %4, %c0 : i32
    scf.if %5 {
      %6 = arith.muli %i2, %c4 : i32
      %7 = arith.muli %i1, %c4 : i32
      %8 = arith.addi %6, %c5 : i32
      %9 = arith.cmpi sle, %8, %7 : i32
      %10 = arith.extui %9 : i1 to i32
      %11 = arith.cmpi sgt, %10, %c0 : i32
      scf.if %11 {
        %12 = vector.load %ref[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
        %13 = vector.shape_cast %12 : vector<1x128x128xf32> to vector<128x128xf32>
        %14 = vector.load %ref_1[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
        %15 = vector.shape_cast %14 : vector<1x128x128xf32> to vector<128x128xf32>
        %16 = tpu.matmul %13, %15, %c3 {dimension_numbers = #tpu.dot_dimension_numbers<[1], [1], [0], [0], [0, 0, 1, 0], [], []>, transpose_lhs_hint = false} : vector<128x128xf32>, vector<128x128xf32>, vector<128x128xf32> -> vector<128x128xf32>
        %17 = arith.mulf %16, %c6 : vector<128x128xf32>
        %18 = vector.multi_reduction <maximumf>, %17, %c7 [1] : vector<128x128xf32> to vector<128xf32>
        %19 = vector.shape_cast %18 : vector<128xf32> to vector<128x1xf32>
        %20 = vector.broadcast %19 : vector<128x1xf32> to vector<128x128xf32>
        %21 = vector.load %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %22 = arith.maximumf %21, %20 : vector<128x128xf32>
        %23 = arith.subf %17, %22 : vector<128x128xf32>
        %24 = math.exp %23 : vector<128x128xf32>
        %25 = arith.subf %21, %22 : vector<128x128xf32>
        %26 = math.exp %25 : vector<128x128xf32>
        %27 = vector.load %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %28 = arith.mulf %26, %27 : vector<128x128xf32>
        %29 = vector.multi_reduction <add>, %24, %c8 [1] : vector<128x128xf32> to vector<128xf32>
        %30 = vector.shape_cast %29 : vector<128xf32> to vector<128x1xf32>
        %31 = vector.broadcast %30 : vector<128x1xf32> to vector<128x128xf32>
        %32 = arith.addf %28, %31 : vector<128x128xf32>
        vector.store %32, %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %33 = vector.load %ref_2[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
        %34 = vector.shape_cast %33 : vector<1x128x128xf32> to vector<128x128xf32>
        %35 = tpu.matmul %24, %34, %c3 {dimension_numbers = #tpu.dot_dimension_numbers<[1], [0], [0], [1], [0, 0, 1, 1], [], []>, transpose_lhs_hint = false} : vector<128x128xf32>, vector<128x128xf32>, vector<128x128xf32> -> vector<128x128xf32>
        %36 = vector.load %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %37 = arith.mulf %26, %36 : vector<128x128xf32>
        %38 = arith.addf %37, %35 : vector<128x128xf32>
        vector.store %38, %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        vector.store %22, %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      } else {
        %39 = vector.load %ref[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
        %40 = vector.shape_cast %39 : vector<1x128x128xf32> to vector<128x128xf32>
        %41 = vector.load %ref_1[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
        %42 = vector.shape_cast %41 : vector<1x128x128xf32> to vector<128x128xf32>
        %43 = tpu.matmul %40, %42, %c3 {dimension_numbers = #tpu.dot_dimension_numbers<[1], [1], [0], [0], [0, 0, 1, 0], [], []>, transpose_lhs_hint = false} : vector<128x128xf32>, vector<128x128xf32>, vector<128x128xf32> -> vector<128x128xf32>
        %44 = arith.mulf %43, %c6 : vector<128x128xf32>
        %45 = vector.broadcast %7 : i32 to vector<128x128xi32>
        %46 = tpu.iota {dimensions = array<i32: 0>} : vector<128x128xi32>
        %47 = arith.addi %45, %46 : vector<128x128xi32>
        %48 = vector.broadcast %6 : i32 to vector<128x128xi32>
        %49 = tpu.iota {dimensions = array<i32: 1>} : vector<128x128xi32>
        %50 = arith.addi %48, %49 : vector<128x128xi32>
        %51 = arith.cmpi sle, %50, %47 : vector<128x128xi32>
        %52 = arith.select %51, %44, %c9 : vector<128x128xi1>, vector<128x128xf32>
        %53 = vector.multi_reduction <maximumf>, %52, %c7 [1] : vector<128x128xf32> to vector<128xf32>
        %54 = vector.shape_cast %53 : vector<128xf32> to vector<128x1xf32>
        %55 = vector.broadcast %54 : vector<128x1xf32> to vector<128x128xf32>
        %56 = vector.load %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %57 = arith.maximumf %56, %55 : vector<128x128xf32>
        %58 = arith.subf %52, %57 : vector<128x128xf32>
        %59 = math.exp %58 : vector<128x128xf32>
        %60 = arith.subf %56, %57 : vector<128x128xf32>
        %61 = math.exp %60 : vector<128x128xf32>
        %62 = vector.load %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %63 = arith.mulf %61, %62 : vector<128x128xf32>
        %64 = vector.multi_reduction <add>, %59, %c8 [1] : vector<128x128xf32> to vector<128xf32>
        %65 = vector.shape_cast %64 : vector<128xf32> to vector<128x1xf32>
        %66 = vector.broadcast %65 : vector<128x1xf32> to vector<128x128xf32>
        %67 = arith.addf %63, %66 : vector<128x128xf32>
        vector.store %67, %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %68 = vector.load %ref_2[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
        %69 = vector.shape_cast %68 : vector<1x128x128xf32> to vector<128x128xf32>
        %70 = tpu.matmul %59, %69, %c3 {dimension_numbers = #tpu.dot_dimension_numbers<[1], [0], [0], [1], [0, 0, 1, 1], [], []>, transpose_lhs_hint = false} : vector<128x128xf32>, vector<128x128xf32>, vector<128x128xf32> -> vector<128x128xf32>
        %71 = vector.load %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        %72 = arith.mulf %61, %71 : vector<128x128xf32>
        %73 = arith.addf %72, %70 : vector<128x128xf32>
        vector.store %73, %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
        vector.store %57, %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      }
    }
    %74 = arith.cmpi eq, %i2, %c10 : i32
    %75 = arith.extui %74 : i1 to i32
    %76 = arith.cmpi sgt, %75, %c0 : i32
    scf.if %76 {
      %77 = vector.load %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %78 = vector.load %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %79 = arith.divf %78, %77 : vector<128x128xf32>
      %80 = vector.shape_cast %79 : vector<128x128xf32> to vector<1x128x128xf32>
      vector.store %80, %ref_3[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
    }
    func.return
  }

  func.func @map_0(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %i1, %c0 : i32, i32, i32
  }

  func.func @map_1(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %0 = arith.addi %i1, %c1 : i32
    %1 = arith.subi %0, %c1 : i32
    %2 = arith.minsi %i2, %1 : i32
    func.return %i0, %2, %c0 : i32, i32, i32
  }

  func.func @map_2(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %0 = arith.addi %i1, %c1 : i32
    %1 = arith.subi %0, %c1 : i32
    %2 = arith.minsi %i2, %1 : i32
    func.return %i0, %2, %c0 : i32, i32, i32
  }

  func.func @map_3(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %i1, %c0 : i32, i32, i32
  }
}
